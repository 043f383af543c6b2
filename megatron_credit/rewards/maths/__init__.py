"""Mathematical answers: text -> one notation -> objects with kinds -> exact comparison.

`notation` brings LaTeX, plain text and Unicode to one spelling, `grammar` reads expressions,
`objects` reads what is made of them (lists, intervals, equations), `equal` compares expressions and
`compare` objects.
"""
