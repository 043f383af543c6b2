"""Starts the tasks of a run on its nodes and watches them: plan, batch script, supervisor.

Standard library only and Python >= 3.9: it travels as one zip file in the run directory and is run
by whatever interpreter a node has, outside of any container.
"""
