"""Take BatchNorm out of any network and keep what it was good for."""
