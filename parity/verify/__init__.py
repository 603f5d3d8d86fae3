"""The verdict on a port that somebody else wrote: `parity verify SOURCE TARGET --contract FILE`.

contract       the file that names how both sides are built and stepped
difference     what differs first, as a value
source_case    PyTorch's side, as a case
raised         exceptions that the code of a port raises
port_program   JAX's side: an opaque step, as written or in float64
interface      the first stage: tensors there and back, a pure step
updates        the updates of both sides, one by one
noise          PyTorch's float32 runs, by which one of JAX is measured
lines          the lines of both files at which values first differ
numbers_stage  the second stage: twenty updates in float64 and float32
behaviour      the third stage: long runs beside the noise of rounding
planted        bugs in the port's step, and how many are noticed
verdict        the verdict, in lines and as JSON
run            `verify`: the stages in order
"""

from parity.verify.run import verify
from parity.verify.verdict import PortVerdict

__all__ = ["PortVerdict", "verify"]
