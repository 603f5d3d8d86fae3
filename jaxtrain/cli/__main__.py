"""`python -m jaxtrain.cli`."""

import sys

from jaxtrain.cli import main

sys.exit(main())
