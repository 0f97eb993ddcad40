"""How ranks agree while they plan, wait for one that is late, and notice one that has ended."""
