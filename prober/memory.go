package prober

import (
	"bytes"
	"os"
)

// used is MemTotal - MemAvailable. watermark returns the sum of the zones' low watermarks
// in bytes; it is called only where the kernel has no MemAvailable.
func (m *meminfo) used(watermark func() (uint64, bool)) (uint64, error) {
	total, available := m.value[memTotal], m.value[memAvailable]
	switch {
	case m.has(memAvailable) && available > total:
		// Seen in containers whose limit is below what the host has available.
		if !m.has(memFree) {
			return 0, errMemRange
		}
		available = m.value[memFree]
	case !m.has(memAvailable):
		available = m.estimate(watermark)
	}
	if available > total {
		return 0, errMemRange
	}
	return total - available, nil
}

// estimate computes MemAvailable as the kernel does since 3.14: free pages above the low
// watermark, and of page cache and reclaimable slab what exceeds the smaller of a half and
// the watermark. Where the parts are missing it is free plus cache.
func (m *meminfo) estimate(watermark func() (uint64, bool)) uint64 {
	free, slab := m.value[memFree], m.value[memSReclaimable]
	if m.has(memActiveFile) && m.has(memInactiveFile) && m.has(memSReclaimable) {
		if low, ok := watermark(); ok {
			cache := m.value[memActiveFile] + m.value[memInactiveFile]
			sum := free + cache - min(cache/2, low) + slab - min(slab/2, low)
			return sum - min(sum, low)
		}
	}
	return free + m.value[memCached] + slab
}

const (
	// maxZoneinfo bounds what is read of /proc/zoneinfo, in bytes: big NUMA machines have
	// hundreds of kilobytes of it.
	maxZoneinfo = 1 << 20
	// maxPages bounds the sum of watermarks, so that bytes fit into 64 bits.
	maxPages = 1 << 40
)

// lowWatermarks adds up the "low" lines of a /proc/zoneinfo, in bytes. The file has them for each zone
// of each NUMA node, in pages.
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
