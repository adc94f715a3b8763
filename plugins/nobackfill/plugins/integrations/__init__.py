"""Use galleries of a gateway, and `Dual`, inside LangChain, LlamaIndex and Haystack."""
