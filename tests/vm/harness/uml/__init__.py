"""The host's side of a machine whose power can be cut: user-mode Linux. Leaves what runs inside to `umlguest`."""
