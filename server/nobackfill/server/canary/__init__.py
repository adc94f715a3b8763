"""Two pairs of query model and gallery side by side: who is answered by which, what they answer,
and whether the new one is worse."""
