"""Benchmark of every operation beside other ways to compute it, with values checked first.

Part of the package, so that an installed wheel has it too; its results and the scripts of a
checkout are in kernels/bench. Nothing else of the package imports it. Of other packages it takes
matplotlib for the pictures, and Liger and cut-cross-entropy where they are installed.
"""
