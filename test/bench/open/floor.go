package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const hops = 5

// hopFloor measures a message of so many bytes through five JetStream hops:
// each consumer publishes to the next stream, waits for its ack, and acks.
// It is what the open path would cost if it were only its facts on the bus.
func hopFloor(ctx context.Context, payload, rounds int) ([]time.Duration, error) {
	dir, err := os.MkdirTemp("", "berth-floor-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	srv, err := server.NewServer(&server.Options{JetStream: true, StoreDir: dir, DontListen: true, NoSigs: true, NoLog: true})
	if err != nil {
		return nil, err
	}
	srv.Start()
	defer func() { srv.Shutdown(); srv.WaitForShutdown() }()
	if !srv.ReadyForConnections(10 * time.Second) {
		return nil, fmt.Errorf("the floor's server is not ready")
	}
	arrived := make(chan struct{}, 1)
	var first jetstream.JetStream
	for i := range hops {
		nc, err := nats.Connect("", nats.InProcessServer(srv))
		if err != nil {
			return nil, err
		}
		defer nc.Close()
		js, err := jetstream.New(nc)
		if err != nil {
			return nil, err
		}
		if i == 0 {
			first = js
		}
		stop, err := hop(ctx, js, i, arrived)
		if err != nil {
			return nil, err
		}
		defer stop()
	}
	body := make([]byte, payload)
	var took []time.Duration
	for range rounds {
		began := time.Now()
		if _, err := first.Publish(ctx, "hop.0", body); err != nil {
			return nil, err
		}
		select {
		case <-arrived:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		took = append(took, time.Since(began))
	}
	return took, nil
}

// hop is the i-th stream with its consumer.
func hop(ctx context.Context, js jetstream.JetStream, i int, arrived chan struct{}) (stop func(), err error) {
	s, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: fmt.Sprintf("HOP%d", i), Subjects: []string{fmt.Sprintf("hop.%d", i)}})
	if err != nil {
		return nil, err
	}
	c, err := s.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "c", AckPolicy: jetstream.AckExplicitPolicy})
	if err != nil {
		return nil, err
	}
	consuming, err := c.Consume(func(m jetstream.Msg) {
		if i+1 < hops {
			_, err = js.Publish(ctx, fmt.Sprintf("hop.%d", i+1), m.Data())
		} else {
			arrived <- struct{}{}
		}
		if err == nil {
			_ = m.Ack()
		}
	})
	if err != nil {
		return nil, err
	}
	return consuming.Stop, nil
}
