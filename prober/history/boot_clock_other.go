//go:build !linux

package history

import "time"

// kernelBootID is that of the process, since no boot id is read here.
func kernelBootID() string { return processBootID() }

var processStart = time.Now()

// kernelClock counts since the start of the process, which processBootID names.
func kernelClock() time.Duration { return time.Since(processStart) }

// threadWrites is not known here.
func threadWrites() int64 { return 0 }
