//go:build !unix

package sqlitefiletest

// freeBytes returns 0: there is no filesystem in memory.
func freeBytes(string) uint64 { return 0 }
