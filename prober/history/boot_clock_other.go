//go:build !linux

package history

import "time"

func kernelBootID() string { return processBootID() }

func kernelClock() func() time.Duration {
	start := time.Now()
	return func() time.Duration { return time.Since(start) }
}

// threadWrites: nobody tells here.
func threadWrites() int64 { return 0 }
