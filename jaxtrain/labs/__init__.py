"""What is built and proved, and has not earned a place: nobody asked for it yet, or no device has measured its gain.

A laboratory may read the internals of the other packages. The core knows none: few files import one, by its public
name and where it is used (`tests/test_architecture.py` lists them).

pipeline       the mesh axis `pipeline`. It moves to `distributed` with a run on several nodes that is faster than with
               fsdp and tensor alone; every figure so far is a prediction
loss_scales    `per_layer_loss_scale`. It moves to `step` with a model that float16 trains with it, and not without
process_watch  which process the others wait for. It moves to `runner` with a straggler that it named on a cluster
"""

__all__ = ["loss_scales", "pipeline", "process_watch"]
