package relay

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"

	"golang.org/x/time/rate"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/relay/gateway"
	"agentctl/relay/kernel"
	"agentctl/transport/edge"
)

// openGateway makes the event gateway and takes its port, if it is to be served. The gateway
// inherits what it was not given: the relay's certificate, its permission for plain HTTP,
// and its event log and identities in any case.
func (r *Relay) openGateway() (err error) {
	if !r.partEnabled(PartSSE) {
		return nil
	}
	if r.events == nil {
		r.log.Warn("the event gateway is not served: there is no event log")
		return nil
	}
	var o gateway.Options
	if r.opt.SSE != nil {
		o = *r.opt.SSE
	}
	o.Log, o.Identities, o.Logger = gatewayLog{r.events, r.queue.Append}, gatewayAuth{r}, r.log.Named("sse")
	if o.MaxData == 0 || o.MaxData > MaxTopicData {
		o.MaxData = MaxTopicData
	}
	o.RelayTopics, o.Bodies, o.Conns = relayTopics, r.bodies, r.conns
	o.AllowOrigins = append(slices.Clone(o.AllowOrigins), r.origins()...)
	// A gateway on loopback behind a proxy gets the proxy's public name as Host.
	if r.public != nil {
		o.Hosts = append(o.Hosts, r.public.Hostname())
	}
	o.Insecure = o.Insecure || r.opt.Insecure
	o.TrustedProxies = append(o.TrustedProxies, r.opt.TrustedProxies...)
	if r.tls != nil && o.TLS == nil {
		o.TLS = r.tls
	}
	if host, port, err := net.SplitHostPort(o.Listen); err == nil && host == "" && o.SubscribeToken == "" {
		// Without a host it listens where the relay does: a relay on loopback must not get a
		// gateway that the network reaches.
		if host, _, err = net.SplitHostPort(r.opt.Listen); err == nil {
			o.Listen = net.JoinHostPort(host, port)
		}
	}
	r.refusals = rate.NewLimiter(maxRefusals, 2*maxRefusals)
	if r.gateway, err = gateway.New(o); err != nil {
		return &OptionError{"SSE", err}
	}
	// Here and not in Run, so that a port that is taken ends the start and not a relay that serves.
	r.gatewayListener, err = gateway.Listen(o)
	return err
}

// runGateway serves the gateway until ctx ends, supervised. If it is given up, the error
// goes to failed. Serve closes its listener, so each restart listens at the same address again.
func (r *Relay) runGateway(ctx context.Context, wg *sync.WaitGroup, failed chan<- error) {
	if r.gateway == nil {
		return
	}
	ln := r.gatewayListener
	serve := func(ctx context.Context) (err error) {
		if ln == nil { // closed by the crash
			if ln, err = edge.Listen(r.gatewayListener.Addr().String()); err != nil {
				return err
			}
		}
		current := ln
		ln = nil
		return r.gateway.Serve(ctx, current)
	}
	wg.Go(func() {
		if err := supervise(ctx, r.log, PartSSE, r.opt.MaxRestarts, serve); err != nil {
			failed <- err
		}
	})
}

// SSEURL is where the gateway's stream is served; "" if nowhere.
func (r *Relay) SSEURL() string {
	if r.gatewayListener == nil {
		return ""
	}
	host := "127.0.0.1"
	if r.public != nil {
		host = r.public.Hostname()
	}
	return baseURL(reachableAddr(r.gatewayListener.Addr().String(), host), r.tls != nil) + gateway.StreamPath
}

// gatewayAuth admits the relay's own tokens to the gateway.
type gatewayAuth struct{ r *Relay }

// Authenticate implements gateway.Authenticator.
func (a gatewayAuth) Authenticate(req *http.Request) (gateway.Identity, error) {
	token, _ := edge.Bearer(req)
	id, err := a.r.store.Verify(token, auth.ClassAgent)
	switch {
	case errors.Is(err, auth.ErrMissing):
		return gateway.Identity{}, gateway.ErrNoToken
	case errors.Is(err, auth.ErrInvalid):
		return gateway.Identity{}, err
	case err != nil: // a valid token without the right to this
		return gateway.Identity{}, fmt.Errorf("%w: %w", gateway.ErrForbidden, err)
	}
	return gateway.Identity{Tenant: id.Tenant, Subject: id.Subject, Scopes: id.Scopes, Topics: id.Topics(), Active: a.r.store.ActiveFromNow(id)}, nil
}

// maxRefusals bounds how many refused and failed calls are published a second. Each is an
// event of the log, and whoever holds a token can cause any number of them. The audit log
// has them all.
const maxRefusals = 10

// publishRefusal publishes a refused or failed call under the topic audit. A served call
// of a board is in the event log already; other plugins log what they do. Without a tenant
// there is nobody to publish to: the token was bad.
func (r *Relay) publishRefusal(rec *kernel.Record) {
	if r.gateway == nil || rec.Tenant == "" || (rec.Decision != kernel.Denied && rec.Decision != kernel.Failed) || !r.refusals.Allow() {
		return
	}
	r.gateway.Emit(rec.Tenant, "audit", struct {
		Decision kernel.Decision `json:"decision"`
		Code     manifest.Code   `json:"code"`
		Reason   string          `json:"reason,omitempty"`
		Actor    string          `json:"actor"`
		Tool     string          `json:"tool,omitempty"`
		NodeID   string          `json:"node_id,omitempty"`
		TraceID  string          `json:"trace_id"`
	}{rec.Decision, rec.Code, rec.Reason, rec.Actor, rec.Tool, rec.NodeID, rec.TraceID})
}
