package edge

import (
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// A refused connection still costs its acceptance, so the kernel drops the attempts of an address that
// has too many of them refused:
//
//	connListener.Accept   refuses the connection with an answer, or a bare close over TLS
//	connListener.block    over blockRate: closes without an answer, and adds the address here
//	blockList.add         the kernel drops its attempts for blockTime; a timer ends the block

// Bounds of blocking. A connection that is accepted and closed costs 10 to 20 us of a CPU: one
// address that opens tens of thousands a second would delay everybody's requests.
const (
	// An address may have this many connections a second refused, after a burst. With more the kernel
	// drops its connection attempts for blockTime, without a process noticing. Its connections that
	// are open are not affected, and TCP repeats an attempt after 1 s.
	blockRate  = 50
	blockBurst = 500
	blockTime  = time.Second
	// maxBlocked bounds the kernel's work for a connection attempt. An address above it is refused as
	// one below blockRate is.
	maxBlocked = 64
)

// blockList are the addresses whose connection attempts to a listener the kernel drops. Only
// addresses that have completed a TCP handshake are blocked, so nobody can block another one by
// forging its address.
type blockList struct {
	ln    *net.TCPListener
	stats *blockStats

	mu       sync.Mutex // protects the fields below
	disabled bool       // the system has no such filter
	until    map[netip.Prefix]time.Time
	counted  int         // in stats
	timer    *time.Timer // of expire; nil: none is blocked
}

// blockStats are the figures of the listeners of a Conns.
type blockStats struct {
	blocked atomic.Int64
	begun   atomic.Uint64
}

// add blocks an address for blockTime. It reports whether it does.
func (b *blockList) add(address netip.Prefix, now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, blocked := b.until[address]; b.disabled || !address.IsValid() || blocked || len(b.until) >= maxBlocked {
		return blocked
	}
	if b.until == nil {
		b.until = make(map[netip.Prefix]time.Time)
	}
	b.until[address] = now.Add(blockTime)
	if b.applyLocked(); b.disabled {
		return false
	}
	b.stats.begun.Add(1)
	if b.timer == nil {
		b.timer = time.AfterFunc(blockTime, b.expire)
	}
	return true
}

// expire ends the blocks that are over. It runs once for all that began within a quarter of
// blockTime.
func (b *blockList) expire() {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	for a, end := range b.until {
		if !end.After(now) {
			delete(b.until, a)
		}
	}
	b.applyLocked()
	if b.timer = nil; len(b.until) > 0 && !b.disabled {
		b.timer = time.AfterFunc(blockTime/4, b.expire)
	}
}

// applyLocked hands the list to the kernel. b.mu is held.
func (b *blockList) applyLocked() {
	blocked := make([]netip.Prefix, 0, len(b.until))
	for a := range b.until {
		blocked = append(blocked, a)
	}
	if dropAttempts(b.ln, blocked) != nil { // the listener is closed, or the system cannot
		b.disabled = true
		clear(b.until)
	}
	b.stats.blocked.Add(int64(len(b.until) - b.counted))
	b.counted = len(b.until)
}
