"""How `varvite.training.rng` reads and sets the generators of each library."""
