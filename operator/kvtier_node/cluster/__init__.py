"""The API server, as the node agent uses it: reads for one pod at a time, and a report of what the ledger holds.

The ledger is the truth and the API its copy: erasing never waits for the API server, and what could not be reported is reported
later, in order. Nothing here decides whether a volume is in use.
"""
