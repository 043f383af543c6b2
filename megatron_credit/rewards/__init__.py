"""Rewards: from a response's text to a number, the same number on every machine.

A reward of this package never raises on what a model may write; it returns 0.0 instead.
"""
