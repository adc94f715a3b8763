"""Images to vectors: decoding within bounds, batches, and the models of a release."""
