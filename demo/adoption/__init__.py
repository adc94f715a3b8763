"""`make demo-adopt`: a table of texts or of pictures moves to another pretrained model."""
