package relay

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"time"

	"go.uber.org/zap"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/relay/hub"
	"agentctl/relay/kernel"
	"agentctl/relay/storage"
	"agentctl/transport/link"
)

// The callbacks of the hub: what the relay does when a device link authenticates, becomes
// ready, reports something and ends.
//
//	auth      authenticateDevice   verify the token; the node gets its name
//	announce  capabilityCache, onDeviceAnnounce   check and store the capabilities
//	ready     onDeviceReady        load the device as a plugin
//	ping      onDevicePing         refresh its presence
//	event     onDeviceEvent        an alert goes into the event log (device_alert.go)
//	loss      onDeviceLost         calls wait; a moment later its tools are unlisted (offline.go)
//	end       onDeviceGone         the offline plugin takes over (offline.go)
//	suspect   onDeviceSuspect      presence
//	clone     onCloneSuspected     presence, an alert, and the registry

// authenticateDevice verifies a device's auth message and returns its grant. Node id and
// tenant come from the token only, not from the message. A refusal names no detail, so that
// somebody who tries tokens learns nothing from it.
// The token is checked in memory; then the proof reads relay.db, and a new board is written there.
func (r *Relay) authenticateDevice(ctx context.Context, a *link.Auth) (*link.Grant, error) {
	if r.clock.check() != "" { // before the token, which such a clock may call not valid yet
		return nil, &link.Refusal{Code: link.CloseDraining, Reason: "clock"}
	}
	id, err := r.store.Verify(a.Token, auth.ClassDevice)
	switch {
	case errors.Is(err, auth.ErrClass), errors.Is(err, auth.ErrScope):
		return nil, &link.Refusal{Code: link.CloseForbidden, Reason: "forbidden"}
	case err != nil:
		return nil, &link.Refusal{Code: link.CloseAuthFailed, Reason: "auth_failed"}
	case !id.Has(manifest.ScopeDeviceConnect) || !manifest.ValidNodeID(id.NodeID) || !id.BoundTo(a.InstanceID):
		return nil, &link.Refusal{Code: link.CloseForbidden, Reason: "forbidden"}
	}
	if err := r.checkProof(ctx, id, a); err != nil {
		return nil, err
	}
	// The name that it proposes counts once it is admitted (onDeviceAnnounce): a copy that is
	// refused does not rename the board.
	err = r.registerNode(ctx, id)
	if errors.Is(err, auth.ErrForeignNode) {
		return nil, &link.Refusal{Code: link.CloseForbidden, Reason: "forbidden"}
	}
	if errors.Is(err, auth.ErrRemoved) { // its tokens were revoked at the same time
		return nil, &link.Refusal{Code: link.CloseAuthFailed, Reason: "auth_failed"}
	}
	if err != nil {
		r.log.Warn("node registry", zap.String("node_id", id.NodeID), zap.Error(err))
		return nil, &link.Refusal{Code: link.CloseDraining, Reason: "overloaded"}
	}
	g := &link.Grant{NodeID: id.NodeID, Tenant: id.Tenant, ProposedName: a.Name, ExpiresAt: id.ValidUntil()}
	// CheckActive is not asked for the end of the token: the session measures that by the
	// monotonic clock, and a refresh extends it (renewToken).
	g.CheckActive = func() error { return r.store.CheckRevoked(id) }
	g.Proved = id.KeyThumbprint != ""
	return g, nil
}

// registerNode registers a board that has proved its identity. A board that the registry knows
// costs no disk. While relay.db fails, a new one is served without an entry, and gets it later:
// its token says which tenant it belongs to, and the token of a node that was removed is
// revoked, which memory knows.
func (r *Relay) registerNode(ctx context.Context, id *auth.Identity) error {
	if tenant, known := r.store.NodeTenant(id.NodeID); known && tenant != id.Tenant {
		return auth.ErrForeignNode
	}
	ctx, cancel := r.registryContext(ctx)
	defer cancel()
	_, err := r.store.UpsertNode(ctx, id.Tenant, id.NodeID, "", nil)
	if storage.Classify(err) != "" {
		return nil // onDeviceAnnounce tries again
	}
	return err
}

// checkProof checks that a board whose token is bound to a key holds the key. A stolen token
// is worth nothing without it. v2 has no proof, so such a token is not accepted there.
func (r *Relay) checkProof(ctx context.Context, id *auth.Identity, a *link.Auth) error {
	switch {
	case id.KeyThumbprint == "" && r.opt.RequireProof:
		return &link.Refusal{Code: link.CloseForbidden, Reason: "proof_required"}
	case id.KeyThumbprint == "":
		return nil
	case !a.V21:
		return &link.Refusal{Code: link.CloseUpgradeRequired, Reason: "upgrade_required"}
	}
	err := r.store.VerifyLinkProof(ctx, id, a.Token, a.Nonce, a.Proof)
	switch {
	case errors.As(err, new(*auth.Error)):
		return &link.Refusal{Code: link.CloseAuthFailed, Reason: "auth_failed"}
	case storage.Classify(err) != "":
		return &link.Refusal{Code: link.CloseDraining, Reason: "overloaded"}
	case err != nil:
		r.log.Warn("check a board's key", zap.String("node_id", id.NodeID), zap.Error(err))
		return &link.Refusal{Code: link.CloseDraining, Reason: "overloaded"}
	}
	return nil
}

// capabilityCache remembers announced capabilities that fit the schema. Boards of one kind
// announce the same bytes, and validation is most of what the opening of a link costs. A board that
// announces many different ones makes the cache start over, which costs others one validation each.
type capabilityCache struct {
	mu    sync.Mutex // protects valid
	valid map[string]struct{}
}

// Bounds of the cache: entries, and bytes of one.
const (
	maxCachedCapabilities   = 256
	maxCachedCapabilitySize = 2 << 10
)

func (c *capabilityCache) validate(raw []byte) error {
	c.mu.Lock()
	_, ok := c.valid[string(raw)]
	c.mu.Unlock()
	if ok {
		return nil
	}
	if err := manifest.Validate(manifest.CapabilityRef, raw); err != nil || len(raw) > maxCachedCapabilitySize {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.valid == nil || len(c.valid) >= maxCachedCapabilities {
		c.valid = make(map[string]struct{}) // a full cache starts over
	}
	c.valid[string(raw)] = struct{}{}
	return nil
}

// onDeviceAnnounce stores what a node has announced, so that a call to an offline node can
// still distinguish an unknown tool from a tool that is unavailable. It writes to disk, which
// OnAnnounce allows and OnReady does not. A disk that fails does not keep the board from
// becoming ready (registry_retry.go).
func (r *Relay) onDeviceAnnounce(n *hub.Node) {
	ctx, cancel := r.registryContext(context.Background())
	defer cancel()
	r.registry.drop(n.ID(), registryWrite{node: r.registry.get(n.ID()).node}) // of an earlier link
	if err := r.saveAnnounce(ctx, n); err != nil {
		r.registryFailed(n.ID(), registryWrite{node: n}, err)
	}
	if n.Proved() && r.store.IsMigrating(n.ID()) {
		// It is linked with its key, and does not need its earlier tokens any more.
		if err := r.store.FinishMigration(ctx, n.ID()); err != nil && storage.Classify(err) == "" {
			r.log.Warn("the next link tries again", zap.String("node_id", n.ID()), zap.Error(err))
		}
	}
}

// onDeviceReady loads a device as a plugin. It replaces the plugin of an earlier link, or
// the offline plugin, in one step: clients see no moment without the device's tools.
func (r *Relay) onDeviceReady(n *hub.Node) {
	// n was ready before if its session was resumed, or if it has announced again.
	before, _ := r.devices.Load(n)
	resumed, _ := before.(*device)
	d := newDevice(n, resumed)
	if err := r.kernel.Load(d, true); err != nil {
		r.log.Error("load device", zap.String("node_id", n.ID()), zap.Error(err))
		return
	}
	r.devices.Store(n, d)
	r.onDevicePing(n)
	// An earlier link may have left these flags set.
	r.onDeviceSuspect(n, false)
	r.kernel.FlagPresence(n.Tenant(), kernel.PresenceDevice, n.ID(), kernel.FlagCloneSuspected, r.hub.CloneSuspected(n.ID()))
}

// onDeviceSuspect publishes that a linked device does not answer, or that it does again.
func (r *Relay) onDeviceSuspect(n *hub.Node, suspect bool) {
	r.kernel.FlagPresence(n.Tenant(), kernel.PresenceDevice, n.ID(), kernel.FlagSuspect, suspect)
}

// onDevicePing keeps a device present, under the name that it has now: an operator may have
// changed it since the link was opened.
func (r *Relay) onDevicePing(n *hub.Node) {
	a, _ := r.store.NodeAttributes(n.ID())
	r.kernel.Heartbeat(kernel.Presence{Tenant: n.Tenant(), Kind: kernel.PresenceDevice, ID: n.ID(), Name: a.Name, Transport: "link"})
}

// onDeviceLost is called when a device may resume its session: its plugin stays, so that
// calls wait for it. If it is not back within offlineGrace, unlistDevice follows.
func (r *Relay) onDeviceLost(n *hub.Node) {
	r.offline.add(&waitingDevice{node: n, expiresAt: time.Now().Add(offlineGrace)})
	r.store.MarkSeen(n.ID())
}

// unlistDevice marks a lost device as offline and takes its tools out of the lists. Calls
// still reach it by name, and wait (hub.Node.Call).
func (r *Relay) unlistDevice(n *hub.Node) {
	r.hub.WhileLost(n, func() {
		v, ok := r.devices.Load(n)
		if !ok {
			return
		}
		d := v.(*device).unlisted()
		if err := r.kernel.Load(d, true); err != nil {
			r.log.Error("unlist device", zap.String("node_id", n.ID()), zap.Error(err))
			return
		}
		r.devices.Store(n, d)
		r.kernel.MarkOffline(n.Tenant(), kernel.PresenceDevice, n.ID())
	})
}

// onDeviceGone replaces the plugin of an ended link by an offline plugin, unless another
// link of the node has taken its place already. A plugin that is unlisted is unloaded: its
// grace is over.
func (r *Relay) onDeviceGone(n *hub.Node) {
	if v, ok := r.devices.LoadAndDelete(n); ok && !r.hub.IsOnline(n.ID()) {
		d := v.(*device)
		p := newOfflinePlugin(d)
		if d.manifest.Unlisted || r.kernel.Load(p, true) != nil {
			r.kernel.Unload(d)
		} else {
			r.offline.add(&waitingDevice{node: n, plugin: p, expiresAt: time.Now().Add(offlineGrace)})
		}
	}
	r.store.MarkSeen(n.ID())
}

// saveBoot and saveCloneTime write to the registry. A relay whose disk is full goes on
// serving; it may then fail to recognize a clone after its next restart.
func (r *Relay) saveBoot(nodeID, bootID string) {
	ctx, cancel := r.registryContext(context.Background())
	defer cancel()
	r.registry.drop(nodeID, registryWrite{boot: r.registry.get(nodeID).boot}) // of an earlier link
	if err := r.store.SaveBoot(ctx, nodeID, bootID); err != nil {
		r.registryFailed(nodeID, registryWrite{boot: bootID}, err)
	}
}

func (r *Relay) saveCloneTime(nodeID string, ms int64) {
	ctx, cancel := r.registryContext(context.Background())
	defer cancel()
	if err := r.store.SaveCloneTime(ctx, nodeID, ms); err != nil && storage.Classify(err) == "" {
		r.log.Warn("node registry", zap.String("node_id", nodeID), zap.Error(err))
	}
}

// onCloneSuspected publishes that two installations use the identity of a node, or that none
// has done so for a day.
func (r *Relay) onCloneSuspected(nodeID string, suspected bool) {
	tenant, ok := r.store.NodeTenant(nodeID)
	if !ok {
		return
	}
	r.kernel.FlagPresence(tenant, kernel.PresenceDevice, nodeID, kernel.FlagCloneSuspected, suspected)
	message := "two installations use the identity of this board; the first one is still served; run agentctl leave on the copy, then agentctl join"
	if !suspected {
		message = "no second installation has used the identity of this board for 24 h"
	}
	r.offerAlert(tenant, &alert{NodeID: nodeID, Level: "warn", Metric: "clone_suspected", Value: 1, Cleared: !suspected, TS: time.Now().UnixMilli(), Message: message})
}

// auditDevice writes what happened to a device into the audit log, the metrics and the log.
// A kind that the switch does not name is a device that broke the protocol: failed.
func (r *Relay) auditDevice(e hub.AuditEvent) {
	if e.Tenant == "" {
		e.Tenant, _ = r.store.NodeTenant(e.NodeID)
	}
	decision, reason := kernel.Failed, e.Kind
	switch e.Kind {
	case "device_connect":
		decision = kernel.Allowed
	case "device_disconnect":
		decision = kernel.Closed
	case "device_refused", "revoked", "clone_suspected":
		decision = kernel.Denied
	}
	if e.Close != 0 {
		reason += " close=" + strconv.Itoa(e.Close)
	}
	r.audit.Write(&kernel.Record{Tenant: e.Tenant, Actor: e.NodeID, Address: e.Address, NodeID: e.NodeID, Tool: e.Tool, Decision: decision, Code: e.Code, Reason: reason, TraceID: e.TraceID})
	r.metrics.countDeviceEvent(e.Kind)
	if e.Kind == "device_refused" && !r.mayLogStranger(e.Address) {
		return // an address that tries again and again has one line a minute
	}
	r.log.Info(e.Kind, zap.String("node_id", e.NodeID), zap.Int("close", e.Close), zap.Stringer("address", e.Address))
}
