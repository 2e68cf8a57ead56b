package hub

import (
	"context"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"
)

// slotWait is how long a link waits for a handshake of its address: less than the 10 s in which
// a board gives its dial up.
const slotWait = 5 * time.Second

// Slot is the right to one unfinished handshake.
type Slot struct {
	hub      *Hub
	client   netip.Addr    // may be invalid
	address  netip.Prefix  // by which slots are counted
	shared   *addressSlots // of the address; nil: the link is not counted by address
	onAuth   func()        // may be nil
	isKnown  bool          // a board has authenticated from the address before
	released atomic.Bool
}

// addressSlots are the slots of one address.
type addressSlots struct {
	*semaphore.Weighted
	users int // slots and calls of Reserve; protected by Hub.mu
	held  int // slots; protected by Hub.mu
}

// Reserve takes a slot for a link of a client, whose share is counted by address
// (edge.AddressKey). It waits up to slotWait while the address has its share, and returns nil if
// there is no slot after that. It is called before the upgrade, when a refusal costs little. The
// caller passes the slot to AttachReserved, or calls Release. onAuth, which may be nil, is called
// when the board has proved its identity.
//
// An address gets a quarter of what is free at most: as handshakes end, many addresses that take
// all they may come to leave slots for another one. A quarter of all is kept for addresses from
// which a board has authenticated since the start.
func (h *Hub) Reserve(ctx context.Context, client netip.Addr, address netip.Prefix, onAuth func()) *Slot {
	h.mu.Lock()
	shared := h.slots[address]
	if shared == nil {
		shared = &addressSlots{Weighted: semaphore.NewWeighted(maxHandshakesPerAddress)}
		h.slots[address] = shared
	}
	shared.users++
	h.mu.Unlock()
	ok := shared.TryAcquire(1)
	if !ok {
		ctx, cancel := context.WithTimeout(ctx, slotWait)
		defer cancel()
		ok = shared.Acquire(ctx, 1) == nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	var slot *Slot
	_, isKnown := h.knownAddresses[address]
	free := h.handshakeLimit - h.handshaking.Load()
	if !isKnown {
		free -= h.handshakeLimit / 4
	}
	if ok && free > 0 && int64(shared.held) < max(1, free/4) {
		if slot = h.newSlotLocked(client, address, shared, onAuth); slot != nil {
			slot.isKnown = isKnown
		}
	}
	if slot == nil {
		if ok {
			shared.Weighted.Release(1)
		}
		h.dropSlotUserLocked(address, shared)
		h.refusedSlots.Add(1)
		return nil
	}
	shared.held++
	return slot
}

// newSlotLocked makes a slot, or returns nil when there are as many as there may be. shared is nil
// for a link without an address. h.mu is held.
func (h *Hub) newSlotLocked(client netip.Addr, address netip.Prefix, shared *addressSlots, onAuth func()) *Slot {
	if h.handshaking.Load() >= h.handshakeLimit {
		return nil
	}
	h.handshaking.Add(1)
	return &Slot{hub: h, client: client, address: address, shared: shared, onAuth: onAuth}
}

// Release ends the handshake's claim to the slot; later calls do nothing.
func (s *Slot) Release() {
	if s.released.Swap(true) {
		return
	}
	h := s.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	h.handshaking.Add(-1)
	if s.shared != nil {
		s.shared.held--
		s.shared.Weighted.Release(1)
		h.dropSlotUserLocked(s.address, s.shared)
	}
}

func (h *Hub) dropSlotUserLocked(address netip.Prefix, shared *addressSlots) {
	if shared.users--; shared.users == 0 {
		delete(h.slots, address)
	}
}

// maxKnownAddresses bounds Hub.knownAddresses. When it is full, any of them is replaced.
const maxKnownAddresses = 16384

// authenticated frees the slot: the board has proved its identity. Its address is known from now
// on.
func (s *Slot) authenticated() {
	s.Release()
	if h := s.hub; s.shared != nil {
		h.mu.Lock()
		if _, ok := h.knownAddresses[s.address]; !ok {
			for a := range h.knownAddresses {
				if len(h.knownAddresses) < maxKnownAddresses {
					break
				}
				delete(h.knownAddresses, a)
			}
			h.knownAddresses[s.address] = struct{}{}
		}
		h.mu.Unlock()
	}
	if s.onAuth != nil {
		s.onAuth()
	}
}
