"""Where the credit falls: how much of each method's stands on the first wrong step of a response.

Shape letters: T tokens of a response, R responses, G groups, D bootstrap draws.
"""
