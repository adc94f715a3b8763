"""Following the newest release: the plan, fetching, carrying over, and the way back."""
