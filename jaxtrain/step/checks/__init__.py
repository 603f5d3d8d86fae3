"""Checks of what a user passes to a step, each of which raises or warns in one line with a remedy.

mistakes       arguments of `train_step`, `eval_step` and their steps
batch          the arrays of a batch
fitting_state  a state that is one of the step
means          means and counts where a step takes sums
pairs          losses of every pair of rows
first_loss     what makes a first loss NaN or inf
diagnosis      what was wrong with the arguments of a call that failed
rebuilding     loops that build their step in every iteration
retrace        a limit on recompilation
"""
