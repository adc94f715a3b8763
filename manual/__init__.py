"""The documentation site: docs/ with a reference made from the contract, the commands and the faces
of the rooms. `make docs` builds it into build/site."""
