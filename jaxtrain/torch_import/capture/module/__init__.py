"""The user's module: its structure, its copies, and what its calls change.

structure   the module without its weights
copying     copies whose functions refer to the copy
reached     what a module reaches besides its parts
placing     where each tensor that a module reads comes from
attributes  what forward assigns besides buffers
carried     attributes that are carried from call to call
restored    a module that is left as it was found
own_module  the user's module itself, used and set back
"""
