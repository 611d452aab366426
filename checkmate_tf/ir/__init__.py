"""The ground floor: graphs, plans, the simulator that judges them. Standard library only."""
