"""What `forward` says about gradients.

inner_gradients  gradients inside forward
custom_gradients `torch.autograd.Function`
lifted           constants of the passes of such functions
no_grad          regions without gradient
"""
