package gateway

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"hash"
	"strconv"
	"sync"

	"agentctl/transport/sse"
)

// Event is one topic event.
type Event struct {
	ID     uint64
	Tenant string // "": an event of the relay, for tenant "default" and scope kernel:admin
	Topic  string
	Data   []byte // compact JSON without CR and LF, at most MaxData
	TimeMS int64  // wall clock, milliseconds since 1970
}

// DefaultTenant is the tenant of requests with a configured token, and of all requests
// where none is configured.
const DefaultTenant = "default"

// event is an Event with its encoding, which all subscribers share.
type event struct {
	id            uint64
	tenant, topic string
	frame         []byte // the encoded event; never changed, since writers of all shards share it
}

func (e *event) chunk() chunk { return chunk{b: e.frame, events: 1, first: e.id, last: e.id} }

// The frame of an event, with the second data line where the gateway has a secret:
//
//	id: 7318349394477057
//	event: log/level
//	data: {"level":"debug"}
//	data: {"sig":"<64 hex>","ts":1790000000000,"d":"<64 hex>"}
//
// A subscriber that knows the secret can verify an event's topic, id, time and data. It can
// detect a missing event only when a log makes the ids consecutive.

// signer encodes events, and signs them: a second data line holds the HMAC-SHA256 of
// "topic\nid\nts\nd", where d is the SHA-256 of the data in hex. A nil signer does not
// sign.
type signer struct {
	mu  sync.Mutex // protects mac
	mac hash.Hash
}

func newSigner(secret []byte) *signer {
	if len(secret) == 0 {
		return nil
	}
	return &signer{mac: hmac.New(sha256.New, secret)}
}

// digest returns d. It is computed before the lock under which events get their ids.
func (s *signer) digest(data []byte) []byte {
	if s == nil {
		return nil
	}
	sum := sha256.Sum256(data)
	return hex.AppendEncode(nil, sum[:])
}

// encode makes the frame of e; d is its digest. Topic and Data have no CR or LF, since
// normalizeEvent checked them.
func (s *signer) encode(e *Event, d []byte) *event {
	var idBuf [20]byte
	id := strconv.AppendUint(idBuf[:0], e.ID, 10)
	size := len(e.Topic) + len(e.Data) + 48
	lines := [2][]byte{e.Data}
	n := 1
	if s != nil {
		var sigBuf [signatureSize]byte
		lines[1] = s.appendSignature(sigBuf[:0], e, d)
		size += len(lines[1])
		n = 2
	}
	frame, _ := sse.AppendEventID(make([]byte, 0, size), id, e.Topic, lines[:n]...)
	return &event{id: e.ID, tenant: e.Tenant, topic: e.Topic, frame: frame}
}

// signatureSize holds the second data line of a signed event.
const signatureSize = 192

// appendSignature appends {"sig":"...","ts":...,"d":"..."}.
func (s *signer) appendSignature(dst []byte, e *Event, d []byte) []byte {
	dst = append(dst, `{"sig":"`...)
	dst = s.appendMAC(dst, e, d)
	dst = append(dst, `","ts":`...)
	dst = strconv.AppendInt(dst, e.TimeMS, 10)
	dst = append(dst, `,"d":"`...)
	dst = append(dst, d...)
	return append(dst, `"}`...)
}

// appendMAC appends the HMAC in hex.
func (s *signer) appendMAC(dst []byte, e *Event, d []byte) []byte {
	var buf [256]byte
	msg := append(append(buf[:0], e.Topic...), '\n')
	msg = append(strconv.AppendUint(msg, e.ID, 10), '\n')
	msg = append(strconv.AppendInt(msg, e.TimeMS, 10), '\n')
	msg = append(msg, d...)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mac.Reset()
	s.mac.Write(msg)
	return hex.AppendEncode(dst, s.mac.Sum(msg[:0]))
}
