"""Pictures and pages for people, made from what a run directory holds."""
