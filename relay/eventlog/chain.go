package eventlog

import (
	"crypto/sha256"
	"strconv"

	"agentctl/relay/kernel"
)

// hashSize is how many bytes of a SHA-256 a row keeps. 16 bytes leave a forger 2^128 tries for
// a row with a given hash.
const hashSize = 16

type rowHash [hashSize]byte

// chainStart is the hash before the first row of a chain. It depends on the log's id, so that
// rows of another log do not fit.
func chainStart(logID, tenant string, class Class) rowHash {
	sum := sha256.Sum256([]byte(logID + "\x00" + tenant + "\x00" + string(class)))
	return rowHash(sum[:hashSize])
}

// hasher computes the hashes of rows. Its buffer is used again; it is not for concurrent use.
type hasher struct{ buf []byte }

// next returns the hash of an event that follows one with the hash prev: the first 16 bytes of
// SHA-256 over
//
//	prev, seq, 0, tenant, 0, type, 0, aggregate_id, 0, payload, 0, created_at
//
// where the numbers are decimal text. No column contains a zero byte.
func (h *hasher) next(prev rowHash, e *kernel.Event) rowHash {
	b := append(h.buf[:0], prev[:]...)
	b = strconv.AppendUint(b, e.Seq, 10)
	b = append(append(b, 0), e.Tenant...)
	b = append(append(b, 0), e.Type...)
	b = append(append(b, 0), e.Aggregate...)
	b = append(append(b, 0), e.Payload...)
	b = strconv.AppendInt(append(b, 0), e.CreatedMS, 10)
	h.buf = b
	sum := sha256.Sum256(b)
	return rowHash(sum[:hashSize])
}

// chain is the rows of one class of one tenant: a row of the table chains. Rows below mark are
// gone, and anchor is the hash of the last of them; head is the hash of the newest row, last. A check of
// the rows from the mark on begins with anchor and must end with head.
//
//	last is 0      no row yet: the transaction that has made the chain is about to add one
//	mark <= last   all rows of the chain from mark on to last are in the table
//	mark > last    retention has removed all rows; mark is last+1, and the next row continues from head
type chain struct {
	id           int64
	tenant       string
	class        Class
	mark, last   uint64
	anchor, head rowHash
	rows, bytes  int64 // of rows that are kept; bytes is an estimate for quotas, with words and chainOverhead

	changed bool // since it was read or written

	// The words of calls that rows from epoch on may use; nil: not read. A full dictionary
	// ends its epoch: the next one begins empty, and the words of the old one are deleted
	// with the rows of their epoch.
	epoch uint64
	words map[word]int64 // to their id
}

// word is a text of the table words, with type and aggregate_id if it begins a payload.
type word struct{ eventType, aggregate, text string }

// isEmpty reports whether no row of the chain is left.
func (c *chain) isEmpty() bool { return c.mark > c.last || c.last == 0 }

type chainKey struct {
	tenant string
	class  Class
}

// Sizes of rows for quotas: what SQLite needs beside the texts. Pages of a table that only grows
// at its end are full, so the sum is nearly what the rows use on disk. MaxBytes does not depend on these
// estimates: it is enforced by counting pages (fileSpace).
const (
	rowOverhead   = 46
	wordOverhead  = 34
	chainOverhead = 96
)

func stateBytes(e *kernel.Event) int64 {
	return int64(rowOverhead + len(e.Type) + len(e.Aggregate) + len(e.Payload))
}

func (r *callRow) bytes() int64 {
	n := rowOverhead + len(r.rest)
	if r.hasTrace {
		n += len(r.trace)
	}
	return int64(n)
}

func (w *word) bytes() int64 {
	return int64(wordOverhead + len(w.eventType) + len(w.aggregate) + len(w.text))
}
