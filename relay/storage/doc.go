// Package storage watches the relay's disk. Each store (relay.db, events.db, the audit log)
// brackets its disk operations:
//
//	op := watch.Begin("commit")
//	err := commit()
//	op.End(err)
//
// A Monitor sees operations that fail, take longer than SlowAfter or do not return, and says
// which store, which operation and since when. Begin and End allocate nothing, take well under
// a microsecond and write nothing; a nil *Watch is valid and does nothing.
//
// # Faults and problems
//
// A fault is what the bracketed operations show. It ends with the next operation of that name
// that succeeds in time. Where nothing is being written, Monitor.Run finds out by the store's
// probe (Watch.SetProbe), at most one at a time and only while a fault lasts: an idle relay
// writes nothing.
//
// Damage lasts until the store is closed, since only an operator can repair it. Whoever knows
// more about a store adds a problem with Watch.Report: background verification that found
// damage, audit lines that were lost.
//
// # Errors
//
// Classify says what kind of fault an error of SQLite or the operating system is. A store
// wraps its errors with Wrap or TimedOut; manifest.AsError makes the caller's answer of them.
//
// watch.go has what a store calls, monitor.go the goroutine that probes and logs, kind.go the kinds of
// problems, error.go the errors and the answers to callers.
package storage
