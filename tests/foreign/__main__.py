"""`python -m tests.foreign [NAME …]`: check published ports and record their reports in docs/foreign.md.

With the packages of `requirements.txt` on PYTHONPATH.
"""

import sys
import warnings

import conftest  # noqa: F401  # the settings of the tests
from tests.foreign import gallery
from tests.foreign.edits import implicit_promotion
from tests.foreign.ports import PORTS

warnings.simplefilter("ignore")
page = gallery.PAGE.read_text()
page = gallery.with_blocks(page, gallery.CODE, gallery.code)
recorded = gallery.blocks(page, gallery.REPORT)
with implicit_promotion():
    for name in sys.argv[1:] or PORTS:
        recorded[name] = gallery.report(name)
        print(recorded[name], flush=True)
        gallery.PAGE.write_text(gallery.with_blocks(page, gallery.REPORT, recorded.__getitem__))
