"""NOBLE branches (noble.txt): `y = Wx + b + up(CosNet(down(x)))`."""
