"""`make demo-adopt`: a table of texts in PostgreSQL moves to another pretrained model."""
