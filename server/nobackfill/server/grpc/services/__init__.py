"""The services of the contract, one file each: messages in and out, a verb each."""
