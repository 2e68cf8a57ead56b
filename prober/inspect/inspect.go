// Package inspect describes the machine it runs on: its system, processes, file systems and network.
// It reads only while a method is called; it has no background work.
//
//	m := inspect.New(inspect.Options{Version: "1.4.0", Now: clock.NowMS})
//	ctx, cancel := context.WithTimeout(ctx, 1800*time.Millisecond)
//	defer cancel()
//	info := m.Info(ctx)
//	fmt.Println(info.Model, info.Unfinished) // what could not be read in time
//
// People ask when a machine is in trouble, so it must cope with disks that hang, 100,000 processes,
// processes that end while they are read, and 10,000 mounts. Every answer has a bounded size, is
// returned when the context ends at the latest, and lists in Unfinished the parts that are missing.
// Text that comes from the machine is shortened to a fixed length, valid UTF-8 and free of control
// characters.
//
// Reads that may hang in the kernel run in separate goroutines, at most maxHung for each part of an
// answer. Nothing can interrupt a goroutine that hangs there: it stays until the kernel returns.
//
// gopsutil reads the counters of drives and interfaces and the usage of file systems. This package
// reads processes itself, because gopsutil opens five files for each process where one is enough. It
// also reads the system itself, because gopsutil's package host starts programs and compiles regular
// expressions whenever agentctl starts.
//
// inspect.go runs the parts of an answer, types.go has the answers; machine_linux.go,
// processes_linux.go, disks_linux.go and network_linux.go read them; remote.go asks a helper process
// for processes that the daemon may not see; mock.go invents answers for mock boards.
//
// Three layers bound an answer: guard refuses a part whose earlier reads hang, collect stops
// waiting when the context ends, and each read checks its context between files or lines.
// handlers.Inspections gives the context (1.8 s at most) and cuts lists to the size of a message.
//
// A Machine keeps no readings between calls: two calls for pages of one list may see different
// lists. Its only state is the count of goroutines that have not returned.
package inspect

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// Options configure a Machine.
type Options struct {
	Root         string                     // directory with proc, sys, etc; "" for /. Tests read their own
	Version      string                     // Info.AgentVersion
	Now          func() (ms int64, ok bool) // milliseconds since 1970; nil or false: unknown
	Synchronized func() bool                // whether NTP synchronizes the clock; nil: unknown
}

// now is Options.Now for a clock that may be missing.
func (o *Options) now() (int64, bool) {
	if o.Now == nil {
		return 0, false
	}
	return o.Now()
}

// maxHung bounds the goroutines that read the same part. A board answers two calls of a kind at a time,
// so a part is refused only if earlier reads of it hang. Later answers then lack that part and no other.
const maxHung = 2

// guard counts the goroutines that read each part. Its zero value is ready.
type guard struct {
	mu      sync.Mutex     // protects running
	running map[string]int // by type of the answer and name of the part
}

// start counts another goroutine for a part; false if maxHung of them run already.
func (g *guard) start(key string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.running[key] >= maxHung {
		return false
	}
	if g.running == nil {
		g.running = make(map[string]int)
	}
	g.running[key]++
	return true
}

// end counts a goroutine as ended.
func (g *guard) end(key string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.running[key]--; g.running[key] == 0 {
		delete(g.running, key)
	}
}

// part is one part of an answer of type T. read runs in a separate goroutine and should return soon
// after ctx ends. It must not touch the answer, which collect may have returned by then: it returns
// a function that enters what it read, or nil if that cannot be read.
type part[T any] struct {
	name string
	read func(ctx context.Context) func(*T)
}

// collect reads all parts concurrently and enters them into out, on the caller's goroutine. It
// returns the names of the parts that could not be read or were not read when ctx ended, in the
// order of parts. A read that is late continues, and its result is dropped. If a result and the end
// of ctx come together, the part may be entered or unfinished.
func collect[T any](ctx context.Context, g *guard, out *T, parts ...part[T]) (unfinished []string) {
	type result struct {
		i     int
		enter func(*T)
	}
	results := make(chan result, len(parts)) // nobody receives from a part that is late
	done := make([]bool, len(parts))
	waiting := 0
	for i, p := range parts {
		key := fmt.Sprintf("%T %s", out, p.name) // two answers have a part "processes"
		if !g.start(key) {
			continue
		}
		waiting++
		go func() {
			enter := p.read(ctx)
			g.end(key) // before the send: the caller may ask again as soon as it has the result
			results <- result{i, enter}
		}()
	}
	for ; waiting > 0; waiting-- {
		select {
		case r := <-results:
			if r.enter != nil {
				r.enter(out)
				done[r.i] = true
			}
			continue
		case <-ctx.Done():
		}
		break
	}
	for i, p := range parts {
		if !done[i] {
			unfinished = append(unfinished, p.name)
		}
	}
	return unfinished
}

// Text makes text of the machine fit for an answer: at most maxChars characters of valid UTF-8, with
// spaces in place of control characters, and without space at its ends. The schemas count
// characters as code points, so Text does too.
func Text(s string, maxChars int) string {
	s = s[:min(len(s), utf8.UTFMax*maxChars)] // does not process megabytes that are cut below
	s = strings.ToValidUTF8(s, "\uFFFD")
	s = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, s)
	s = strings.TrimSpace(s)
	for i, n := 0, 0; i < len(s); n++ {
		if n == maxChars {
			return strings.TrimSpace(s[:i])
		}
		_, size := utf8.DecodeRuneInString(s[i:])
		i += size
	}
	return s
}

// pageOf returns at most limit elements of a list, from skip on. Any skip is valid: a negative one
// counts as 0, and one beyond the end returns no elements.
func pageOf[T any](list []T, skip, limit int) []T {
	skip = min(max(skip, 0), len(list))
	return list[skip:min(skip+limit, len(list))]
}
