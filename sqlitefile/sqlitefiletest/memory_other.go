//go:build !unix

package sqlitefiletest

// MemoryDir returns "": there is no filesystem in memory.
func MemoryDir() string { return "" }
