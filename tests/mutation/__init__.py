"""Mutation testing: bugs of one line, planted in the sources, are seen by the laws of their area.

`python -m tests.mutation --help` explains the command, which runs nightly on Python 3.12 or later.
"""
