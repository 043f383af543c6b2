"""Process reward models: scores in [0, 1] for the steps of a response, computed in processes of
their own. A score that cannot be had is NaN with the reason in words, never a guess."""
