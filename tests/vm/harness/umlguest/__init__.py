"""The guest's side of a user-mode Linux machine. Standard library only: it runs before anything is set up."""
