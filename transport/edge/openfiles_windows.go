package edge

// maxOpenFiles returns a number that Windows does not limit; only clients run there.
func maxOpenFiles() uint64 { return 16384 }
