"""A class table whose classes come and go while it trains, and are known by their names."""
