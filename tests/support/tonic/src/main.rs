//! A client of the ext_proc server on tonic, which takes the same steps as the one on grpc-go beside it: a line of the
//! input is "check SERVICE", "watch SERVICE", "open", "send BASE64", "receive", "close" or "cancel". Messages are bytes
//! that the caller made.

use bytes::{Buf, BufMut};
use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use std::{env, time::Duration};
use tokio::io::{AsyncBufReadExt, BufReader, stdin};
use tokio::{sync::mpsc, task::JoinHandle};
use tokio_stream::{Stream, iter, wrappers::UnboundedReceiverStream};
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Response, Status, Streaming, client::Grpc};

const PROCESS: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";
const WATCH: &str = "/grpc.health.v1.Health/Watch";
const CHECK: &str = "/grpc.health.v1.Health/Check";

type Reply = Result<Response<Streaming<Vec<u8>>>, Status>;

#[derive(Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Vec<u8>;
    type Decode = Vec<u8>;
    type Encoder = Raw;
    type Decoder = Raw;
    fn encoder(&mut self) -> Raw {
        Raw
    }
    fn decoder(&mut self) -> Raw {
        Raw
    }
}

impl Encoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;
    fn encode(&mut self, item: Vec<u8>, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put_slice(&item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;
    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Vec<u8>>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining()).to_vec()))
    }
}

async fn call<S>(channel: Channel, path: &'static str, messages: S) -> Reply
where
    S: Stream<Item = Vec<u8>> + Send + 'static,
{
    let mut client = Grpc::new(channel);
    client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    client.streaming(Request::new(messages), path.parse().unwrap(), Raw).await
}

/// A HealthCheckRequest.
fn service(name: &str) -> Vec<u8> {
    if name.is_empty() { vec![] } else { [&[0x0a, name.len() as u8], name.as_bytes()].concat() }
}

fn code(of: Code) -> String {
    if of == Code::Ok { "OK".into() } else { format!("{of:?}") }
}

/// What a HealthCheckResponse says, and how the call went.
fn health(answer: Result<Option<Vec<u8>>, Status>) -> String {
    let known = |said: Vec<u8>| if said.ends_with(&[8, 1]) { "SERVING" } else { "NOT_SERVING" };
    match answer {
        Ok(Some(said)) => format!("{} OK", known(said)),
        Ok(None) => "UNKNOWN OK".into(),
        Err(status) => format!("UNKNOWN {}", code(status.code())),
    }
}

/// A call whose answer's headers may still be on their way.
struct Call {
    sender: Option<mpsc::UnboundedSender<Vec<u8>>>,
    begun: Option<JoinHandle<Reply>>,
    stream: Option<Streaming<Vec<u8>>>,
}

impl Call {
    fn new(channel: &Channel, path: &'static str) -> Call {
        let (sender, messages) = mpsc::unbounded_channel();
        let begun = tokio::spawn(call(channel.clone(), path, UnboundedReceiverStream::new(messages)));
        Call { sender: Some(sender), begun: Some(begun), stream: None }
    }

    fn send(&self, message: Vec<u8>) {
        if self.sender.as_ref().is_none_or(|sender| sender.send(message).is_err()) {
            println!("not sent");
        }
    }

    async fn receive(&mut self) -> Result<Option<Vec<u8>>, Status> {
        if let Some(begun) = self.begun.take() {
            self.stream = Some(begun.await.map_err(|error| Status::internal(error.to_string()))??.into_inner());
        }
        match &mut self.stream {
            Some(stream) => stream.message().await,
            None => Err(Status::internal("there is no call")),
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if let Some(begun) = &self.begun {
            begun.abort();
        }
    }
}

async fn step(channel: &Channel, line: &str, open: &mut Option<Call>, watched: &mut Option<Call>) {
    let (step, rest) = line.split_once(' ').unwrap_or((line, ""));
    match step {
        "check" => {
            let answer = match call(channel.clone(), CHECK, iter([service(rest)])).await {
                Ok(found) => found.into_inner().message().await,
                Err(status) => Err(status),
            };
            println!("{}", health(answer));
        }
        "watch" => {
            let watch = watched.get_or_insert_with(|| {
                let mut made = Call::new(channel, WATCH);
                made.send(service(rest));
                made.sender = None; // it is one message
                made
            });
            println!("{}", health(watch.receive().await));
        }
        "open" => *open = Some(Call::new(channel, PROCESS)),
        "cancel" => *open = None,
        _ => {
            let call = open.as_mut().expect("open comes first");
            match step {
                "send" => call.send(BASE64.decode(rest).expect("base64")),
                "close" => call.sender = None,
                "receive" => match call.receive().await {
                    Ok(Some(message)) => println!("{}", BASE64.encode(message)),
                    Ok(None) => println!("end"),
                    Err(status) => println!("{}", code(status.code())),
                },
                _ => panic!("no step {step}"),
            }
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let address = env::args().nth(1).expect("usage: tonic-client HOST:PORT");
    let channel = Endpoint::from_shared(format!("http://{address}"))
        .expect("an address")
        .timeout(Duration::from_secs(60))
        .connect_lazy();
    let (mut open, mut watched) = (None, None);
    let mut lines = BufReader::new(stdin()).lines();
    while let Some(line) = lines.next_line().await.expect("lines of text") {
        step(&channel, line.trim_end(), &mut open, &mut watched).await;
    }
}
