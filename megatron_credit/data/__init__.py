"""The user's prompts: read from files, vetted row by row, and handed out in a fixed order."""
