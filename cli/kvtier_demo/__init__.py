"""The demonstration: why a left-over KV-cache file is prompt data, and what kvtier leaves in its place.

`attack` recovers a prompt from a file, `model` and `consumer` make a real file to attack, `stock` writes it as a stock
engine does, `demo` runs the whole and `report` prints it. Only `model` and what imports it need torch.
"""
