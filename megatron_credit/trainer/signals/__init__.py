"""Signals of the credit methods: each computed once, only where a method reads it, on Megatron.

A source fills fields of `credit.Group`. What needs texts is decided on the rank that sampled and
broadcast; passes of the model are made by all ranks.
"""
