"""Images as ciphertext on a gateway: keys, encryption, the queue of what is to go, transfers."""
