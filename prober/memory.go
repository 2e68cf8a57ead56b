package prober

import (
	"bytes"
	"os"
)

// used is MemTotal - MemAvailable. watermark gives the sum of the zones' low
// watermarks in bytes, asked for only where the kernel has no MemAvailable.
func (m *meminfo) used(watermark func() (uint64, bool)) (uint64, error) {
	available := m.available
	switch {
	case m.has(sawAvailable) && available > m.total:
		// Seen in containers whose limit is below what the host has available.
		if !m.has(sawFree) {
			return 0, errMemRange
		}
		available = m.free
	case !m.has(sawAvailable):
		available = m.estimate(watermark)
	}
	if available > m.total {
		return 0, errMemRange
	}
	return m.total - available, nil
}

// estimate is the kernel's own sum for MemAvailable, for kernels before 3.14:
// free pages above the low watermark, and of page cache and reclaimable slab what
// is more than half or than the watermark. Without the parts for it, free plus
// cache.
func (m *meminfo) estimate(watermark func() (uint64, bool)) uint64 {
	if m.has(sawActiveFile | sawInactiveFile | sawSReclaimable) {
		if low, ok := watermark(); ok {
			cache := m.activeFile + m.inactiveFile
			sum := m.free + cache - min(cache/2, low) + m.sReclaimable - min(m.sReclaimable/2, low)
			return sum - min(sum, low)
		}
	}
	return m.free + m.cached + m.sReclaimable
}

// maxZoneinfo bounds what is read of /proc/zoneinfo: big NUMA machines have
// hundreds of kilobytes of it.
const maxZoneinfo = 1 << 20

// maxPages bounds the sum of watermarks, so that bytes fit into 64 bits.
const maxPages = 1 << 40

// lowWatermarks adds up the "low" lines of a /proc/zoneinfo, in bytes.
func lowWatermarks(path string) (sum uint64, ok bool) {
	b, err := readLimited(path, maxZoneinfo)
	if err != nil {
		return 0, false
	}
	for line := range bytes.Lines(b) {
		pages, isLow := bytes.CutPrefix(bytes.TrimSpace(line), []byte("low "))
		if !isLow {
			continue
		}
		n, _, ok := parseUint(bytes.TrimSpace(pages))
		if sum += n; !ok || n > maxPages || sum > maxPages {
			return 0, false
		}
	}
	return sum * uint64(os.Getpagesize()), true
}
