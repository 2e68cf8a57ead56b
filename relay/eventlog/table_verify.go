package eventlog

import (
	"slices"
	"strings"
	"sync"

	"agentctl/relay/kernel"
	"agentctl/sqlitefile"
)

// Bounds of the goroutines that check the table of state. A start waits for them, and a log of 800,000
// events keeps one busy for half a second.
const (
	maxTableParts = 4
	minPartLeaves = 256 // 1 MiB
)

// maxPresenceSubjects bounds leafIndex.presence.
const maxPresenceSubjects = 4 * kernel.MaxPresences

// leafIndex says which leaves of a table a replay has to read. The check of the rows makes it, since it
// reads all of them anyway. An index in the file would have to be written by each commit.
type leafIndex struct {
	types map[string]*leafList
	// presence has the leaf of the newest event about each device and agent; nil when there are too
	// many of them.
	presence map[presenceSubject]*int
}

// leafList is the leaves that hold events of one type, ascending.
type leafList struct{ leaves []int }

// presenceSubject is what an event about presence is about.
type presenceSubject struct {
	chain           int64
	kind, aggregate string
}

func newLeafIndex() leafIndex {
	return leafIndex{types: make(map[string]*leafList), presence: make(map[presenceSubject]*int)}
}

// note notes an event in a leaf, which is the leaf of the event before it or a later one.
func (x *leafIndex) note(chain int64, e *kernel.Event, leaf int) {
	list := x.types[e.Type]
	if list == nil {
		list = &leafList{}
		x.types[strings.Clone(e.Type)] = list
	}
	if n := len(list.leaves); n == 0 || list.leaves[n-1] != leaf {
		list.leaves = append(list.leaves, leaf)
	}
	// There are many events about the presence of few boards, so a start reads most of their leaves
	// once only.
	if kind, ok := kernel.PresenceKind(e); ok {
		x.notePresence(presenceSubject{chain, kind, e.Aggregate}, leaf)
	}
}

// notePresence notes the leaf of an event about presence as that of the newest one.
func (x *leafIndex) notePresence(subject presenceSubject, leaf int) {
	if x.presence == nil {
		return
	}
	switch newest := x.presence[subject]; {
	case newest != nil:
		*newest = leaf
	case len(x.presence) < maxPresenceSubjects:
		subject.aggregate = strings.Clone(subject.aggregate)
		first := leaf // the parameter stays off the heap
		x.presence[subject] = &first
	default:
		x.presence = nil
	}
}

// append adds the index of leaves behind those of x.
func (x *leafIndex) append(behind leafIndex) {
	for name, list := range behind.types {
		if before := x.types[name]; before != nil {
			before.leaves = append(before.leaves, list.leaves...)
		} else {
			x.types[name] = list
		}
	}
	if behind.presence == nil {
		x.presence = nil
	}
	for subject, leaf := range behind.presence {
		x.notePresence(subject, *leaf)
	}
}

// verify checks the rows against their chains, as verifier does, and makes the index of the leaves. It
// checks some parts of the table at the same time, each in a goroutine, and waits for them. Then it joins
// the results in the order of the parts.
func (t *stateTable) verify(parts int) error {
	var wg sync.WaitGroup
	checks := make([]*tablePart, parts)
	for i := range checks {
		p := t.part(i*t.rows.Leaves()/parts, (i+1)*t.rows.Leaves()/parts)
		checks[i] = p
		wg.Go(func() { p.err = p.verify() })
	}
	wg.Wait()

	chains := make([]*chain, 0, len(t.chains))
	for _, c := range t.chains {
		chains = append(chains, c)
	}
	v := newVerifier(nil, VerifyOptions{})
	v.follow(ClassState, chains)
	t.leafIndex = newLeafIndex()
	for _, p := range checks {
		if p.err != nil {
			return p.err
		}
		p.connect(v)
		t.append(p.leafIndex)
	}
	v.end(ClassState, chains)
	return v.firstFault()
}

// tablePart is consecutive leaves of a table that one goroutine checks. A hash needs the hash of the
// row before it in the chain, which another part may have, so the first row of each chain is taken as it
// is, and connect checks it when all parts are done.
type tablePart struct {
	leafIndex
	rows   *sqlitefile.Table // its leaves only
	first  int               // the index of the first of them in the whole table
	known  map[int64]*chain  // of the log
	firsts []chainRow        // the first row of each chain
	v      *verifier         // of the rows behind these
	err    error
}

// chainRow is a row that no verifier has checked yet.
type chainRow struct {
	chain int64
	event kernel.Event
	hash  []byte
}

// part returns the leaves from first up to, and without, end.
func (t *stateTable) part(first, end int) *tablePart {
	leaves := make([]int, 0, end-first)
	for i := first; i < end; i++ {
		leaves = append(leaves, i)
	}
	return &tablePart{rows: t.rows.Only(leaves), first: first, known: t.chains, leafIndex: newLeafIndex(), v: newVerifier(nil, VerifyOptions{})}
}

// verify checks the rows behind the first one of each chain.
func (p *tablePart) verify() error {
	for i := range p.rows.Leaves() {
		err := p.rows.Rows(i, func(r *sqlitefile.Record) error {
			e, id, hash, err := parseState(r)
			if err != nil {
				return err
			}
			if c := p.known[id]; p.v.chains[id] == nil && c != nil && c.class == ClassState && len(hash) == hashSize {
				p.begin(c, &e, hash)
			} else {
				p.v.row(ClassState, id, &e, hash)
			}
			p.note(id, &e, p.first+i)
			return nil
		})
		if err != nil {
			return err
		}
		if err := p.v.firstFault(); err != nil {
			return err
		}
	}
	return nil
}

// begin keeps the first row of a chain, whose texts are those of a record.
func (p *tablePart) begin(c *chain, e *kernel.Event, hash []byte) {
	first := *e
	first.Type, first.Aggregate, first.Payload = strings.Clone(e.Type), strings.Clone(e.Aggregate), slices.Clone(e.Payload)
	p.firsts = append(p.firsts, chainRow{c.id, first, slices.Clone(hash)})
	p.v.chains[c.id] = &chain{id: c.id, tenant: c.tenant, class: c.class, last: e.Seq, head: rowHash(hash)}
}

// connect checks the first row of each chain as the next one of v, and advances v behind the last row.
func (p *tablePart) connect(v *verifier) {
	for _, r := range p.firsts {
		v.row(ClassState, r.chain, &r.event, r.hash)
		if !v.bad[r.chain] {
			v.chains[r.chain].last, v.chains[r.chain].head = p.v.chains[r.chain].last, p.v.chains[r.chain].head
		}
	}
}
