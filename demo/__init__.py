"""The life that `make demo` runs: commands and gRPC calls only, as a person and an app use them."""
