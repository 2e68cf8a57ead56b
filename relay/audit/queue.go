package audit

import (
	"sync"
	"sync/atomic"
	"time"

	"agentctl/relay/kernel"
)

// Bounds of the queue. A record counts with its bytes in memory, at least minCost, so that
// maxCost bounds both bytes and records: 4 MiB, 8192 records.
const (
	maxCost = 4 << 20
	minCost = 512
	wakeAt  = 512         // records, from which on the writer does not wait for its tick
	freeFor = maxCost / 4 // cost up to which every record is admitted
	// maxKeptCap is the capacity, in records, that an empty queue keeps for the next ones.
	maxKeptCap = 4 * wakeAt
	// maxCommits bounds the callers of Commit that wait.
	maxCommits = 64
)

// entry is a record in the queue. It is formatted by the writer, so that a call pays for a copy.
type entry struct {
	record   kernel.Record
	unixNano int64
}

// cost is what an entry takes of the queue. Fields are cut when they are written, but not here:
// the whole string stays in memory.
func (e *entry) cost() int {
	r := &e.record
	return max(minCost, 256+len(r.Tenant)+len(r.Actor)+len(r.Via)+len(r.Tool)+len(r.NodeID)+len(r.Target)+len(r.Reason)+len(r.TraceID))
}

// commit is a record whose caller waits until it is on the disk (Log.Commit).
type commit struct {
	entry
	done      chan error  // capacity 1
	abandoned atomic.Bool // nobody waits any more
	isProbe   bool        // no record: sync only
}

// queue holds the records that wait for the writer.
//
// Shares. While most of the queue is free, everything is taken. From a quarter on, a record is
// taken if its identity (tenant and actor) has less in the queue than is free, and its tenant less
// than twice that. So one identity gets at most half of the queue and a tenant two thirds; of n
// identities that flood it each gets 1/(n+1), and as much stays free for others, whose records are
// few and are not lost. This is the dynamic threshold of shared-memory switches (Choudhury and
// Hahne, 1998). The counts that it needs exist only while the queue is that full.
type queue struct {
	mu         sync.Mutex // protects the fields below; a leaf, held for no disk operation
	entries    []entry
	used       int // sum of cost
	commits    []*commit
	identities map[identity]int // cost of each; nil: not counted, since little is queued
	tenants    map[string]int   // as identities
	closed     bool
}

// identity is whose share a record takes.
type identity struct{ tenant, actor string }

// len returns the number of records that are queued.
func (q *queue) len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.entries)
}

// add appends a record and returns how many are queued, or says why it is lost. It appends first and
// removes a record that is refused, so that one that is admitted is copied once.
func (q *queue) add(r *kernel.Record) (reason lossReason, queued int) {
	now := time.Now().UnixNano()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.entries = append(q.entries, entry{*r, now})
	e := &q.entries[len(q.entries)-1]
	cost := e.cost()
	if reason = q.admitLocked(r, cost); reason != noLoss {
		*e = entry{}
		q.entries = q.entries[:len(q.entries)-1]
		return reason, 0
	}
	q.used += cost
	return noLoss, len(q.entries)
}

// admitLocked decides whether a record may enter, and counts it.
func (q *queue) admitLocked(r *kernel.Record, cost int) lossReason {
	switch {
	case q.closed:
		return lostStopped
	case q.used < freeFor:
		return noLoss
	}
	if q.identities == nil {
		q.countLocked()
	}
	id, free := identity{r.Tenant, r.Actor}, maxCost-q.used
	switch {
	case cost > free:
		return lostFull
	case q.identities[id]+cost > free, q.tenants[r.Tenant]+cost > 2*free:
		return lostShare
	}
	q.identities[id] += cost
	q.tenants[r.Tenant] += cost
	return noLoss
}

// countLocked counts what is queued. The last entry is the one that asks to be admitted.
func (q *queue) countLocked() {
	q.identities, q.tenants = make(map[identity]int), make(map[string]int)
	for i := range q.entries[:len(q.entries)-1] {
		e := &q.entries[i]
		q.identities[identity{e.record.Tenant, e.record.Actor}] += e.cost()
		q.tenants[e.record.Tenant] += e.cost()
	}
}

// addCommit appends a record whose caller waits. Commits are few and need no share.
func (q *queue) addCommit(c *commit) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.closed:
		return errStopped
	case len(q.commits) >= maxCommits:
		return errBusy
	}
	q.commits = append(q.commits, c)
	return nil
}

// take returns everything that is queued. spare is an empty slice for the next records: writer and queue
// swap two slices, so that a busy log allocates none. One that a burst has made large is dropped.
func (q *queue) take(spare []entry) ([]entry, []*commit) {
	q.mu.Lock()
	defer q.mu.Unlock()
	entries, commits := q.entries, q.commits
	if cap(spare) > maxKeptCap {
		spare = nil
	}
	q.entries, q.commits, q.used = spare, nil, 0
	q.identities, q.tenants = nil, nil
	return entries, commits
}

// takeCommits returns the waiting commits only. The writer calls it while the disk does not take its
// batch: records then stay in the queue, which bounds them, but callers of Commit get the error.
func (q *queue) takeCommits() []*commit {
	q.mu.Lock()
	defer q.mu.Unlock()
	commits := q.commits
	q.commits = nil
	return commits
}

// close refuses further records, and returns those that nobody will write.
func (q *queue) close() []entry {
	q.mu.Lock()
	q.closed = true // first: what is added until then is taken below
	q.mu.Unlock()
	entries, commits := q.take(nil)
	for _, c := range commits {
		c.done <- errStopped
	}
	return entries
}

// lossReason says why a record was lost.
type lossReason int

const (
	noLoss      lossReason = iota
	lostShare              // its identity or tenant had its share of the queue
	lostFull               // the queue was full
	lostStorage            // the disk did not take it
	lostStopped            // the relay was stopping
	lossReasons
)

var lossReasonNames = [lossReasons]string{lostShare: "share", lostFull: "full", lostStorage: "storage", lostStopped: "stopped"}

// Classes of identities: whose record was lost.
const (
	classAgent = iota // or a person, or a plugin
	classBoard
	classAdmin // a change that was to be committed
	lossClasses
)

var lossClassNames = [lossClasses]string{"agent", "board", "admin"}

func classOf(r *kernel.Record) int {
	if r.NodeID != "" && r.Actor == r.NodeID {
		return classBoard
	}
	return classAgent
}

// Loss is a number of lost records. Reason is share, full, storage or stopped; Class is agent,
// board or admin.
type Loss struct {
	Reason string `json:"reason"`
	Class  string `json:"class"`
	Lines  uint64 `json:"lines"`
}

// losses counts lost records since the start. reported has the counts of the last report to OnLost.
type losses struct {
	counts [lossReasons][lossClasses]atomic.Uint64

	mu         sync.Mutex // protects the fields below
	reported   [lossReasons][lossClasses]uint64
	reportedAt time.Time
}

func (l *losses) add(r lossReason, class int, n uint64) { l.counts[r][class].Add(n) }

// addQueued counts records that are given up at the end.
func (l *losses) addQueued(entries []entry) {
	for i := range entries {
		l.add(lostStorage, classOf(&entries[i].record), 1)
	}
}

// all returns the counts.
func (l *losses) all() []Loss {
	var list []Loss
	for r := noLoss + 1; r < lossReasons; r++ {
		for c := range lossClasses {
			list = append(list, Loss{lossReasonNames[r], lossClassNames[c], l.counts[r][c].Load()})
		}
	}
	return list
}

// unreported returns what was lost since the last report, unless that is younger than a minute.
func (l *losses) unreported(now time.Time) []Loss {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.reportedAt.IsZero() && now.Sub(l.reportedAt) < reportInterval {
		return nil
	}
	var list []Loss
	for r := noLoss + 1; r < lossReasons; r++ {
		for c := range lossClasses {
			n := l.counts[r][c].Load()
			if n > l.reported[r][c] {
				list = append(list, Loss{lossReasonNames[r], lossClassNames[c], n - l.reported[r][c]})
				l.reported[r][c] = n
			}
		}
	}
	if len(list) > 0 {
		l.reportedAt = now
	}
	return list
}
