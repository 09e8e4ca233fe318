"""Steps that wait for no other rank."""
